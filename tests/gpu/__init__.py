"""What only a GPU can show: ``make gpu-check`` runs the tests marked ``cuda``, these and those of other rooms.

Most of these tests have a second parameter, the CPU, where small shapes run through the same code, so that no error of
their own waits for a GPU. ``docs/dev/gpus.md`` says what is compared.
"""
