"""`python -m fsdp_cpp` says what the package was built with."""

from ._C import version
from ._build import BUILT_WITH, TORCH_VERSION

print(f"fsdp_cpp {version} for torch {TORCH_VERSION} with {BUILT_WITH}")
