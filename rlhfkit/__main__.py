"""``python -m rlhfkit`` is the command ``rlhfkit``, also below a launcher: ``torchrun ... -m rlhfkit fit ...``."""

from rlhfkit.cli.main import main

if __name__ == "__main__":
    main()
