"""Which runs are measured, and what their parts depend on."""

from benchmarks.scale.rank import RunSize

COMPARED = RunSize(prompts=96, group_size=8, prompt_tokens=128, tokens=1024)
"""The size that was measured on the old path too."""

CALIBRATION = [
    (COMPARED, 1),
    (COMPARED, 2),
    (RunSize(prompts=96, group_size=8, prompt_tokens=128, tokens=256), 4),
    (RunSize(prompts=384, group_size=8, prompt_tokens=128, tokens=128), 2),
    (RunSize(prompts=96, group_size=16, prompt_tokens=64, tokens=512, sigma=0.6), 2),
    (RunSize(prompts=96, group_size=16, prompt_tokens=128, tokens=1920), 2),
    (RunSize(prompts=96, group_size=16, prompt_tokens=64, tokens=1024), 4),
]
"""Sizes and numbers of ranks that the constants are fitted to."""

CHECKS = [
    (RunSize(prompts=64, group_size=16, prompt_tokens=96, tokens=768), 1),
    (RunSize(prompts=128, group_size=16, prompt_tokens=96, tokens=768), 2),
    (COMPARED, 4),
    (RunSize(prompts=96, group_size=16, prompt_tokens=192, tokens=1536), 4),
    (COMPARED, 6),
    (RunSize(prompts=192, group_size=16, prompt_tokens=64, tokens=512, sigma=0.6), 6),
]
"""Runs that must be predicted within 25 %."""

LARGE = RunSize(prompts=1024, group_size=16, prompt_tokens=128, tokens=1920), 4
"""16,384 samples of 2,048 tokens."""

SMALL = RunSize(prompts=128, group_size=8, prompt_tokens=64, tokens=448, sigma=0.6), 2
"""1,024 samples of very different lengths, for the test suite."""

DRIVERS_OF_PARTS: dict[str, tuple[str, ...]] = {
    "engine": ("own answer token", "own sequence"),
    "score": ("own answer token", "own sequence"),
    "log": ("own sequence", "group", "rank", "iteration"),
    "stack": ("own token", "own padded token", "own sequence"),
    "summary": ("sequence", "own sequence", "other rank", "iteration"),
    "plan": ("sequence", "sequence x log"),
    "move": ("moved token", "own padded token", "other rank"),
    "prepare": ("own padded token", "sequence", "iteration"),
    "metrics": ("own padded token", "sequence", "iteration"),
    "select": ("own padded token", "own token", "own micro-batch"),
    "collect": ("own token", "own padded token", "sequence", "iteration"),
    "resident": ("own token", "iteration"),
    "peak": ("moved token", "own padded token", "iteration"),
    "sent": ("moved token", "own sequence"),
}
"""Of each part, by name in :data:`benchmarks.scale.rank.PARTS`: the drivers of its cost."""
