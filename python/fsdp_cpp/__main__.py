"""`python -m fsdp_cpp` says what the package was built with."""

from . import __version__
from ._build import BUILT_WITH, TORCH_VERSION

print(f"fsdp_cpp {__version__} for torch {TORCH_VERSION} with {BUILT_WITH}")
