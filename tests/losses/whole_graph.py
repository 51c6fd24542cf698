"""A mark for tests that compile without graph breaks."""

import pytest
import torch
from packaging.version import Version

WHOLE_GRAPH = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 13),
    reason="torch 2.7 breaks the graph at properties of tuples and compiles the parts; 2.13 is tested",
)
