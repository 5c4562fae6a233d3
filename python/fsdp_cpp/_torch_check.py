"""Whether the installed torch is the one that this package was built for."""


def check() -> None:
    import torch
    from ._build import TORCH_VERSION
    installed = torch.__version__.split("+")[0]
    if installed.split(".")[:2] != TORCH_VERSION.split(".")[:2]:
        raise ImportError(f"fsdp_cpp was built for torch {TORCH_VERSION}, and torch {torch.__version__} is installed; build it "
                          "again: pip install --no-build-isolation . in the folder of fsdp.cpp")
