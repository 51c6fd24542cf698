"""Features of modules as parts, one in a file: what a run does not use is not loaded.

May import: ``rlhfkit.parts``, the files of ``modules/``, models, data, losses. Other files of ``modules/`` import one
where its argument is read, not at their top.
Start at :mod:`rlhfkit.modules.parts.entropy`, then :mod:`rlhfkit.parts`.
"""
