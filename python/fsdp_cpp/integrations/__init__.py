"""Programs written for other libraries, on sharded models; docs/integrations.md. Each module imports its library:

    from fsdp_cpp.integrations.accelerate import Accelerator
    from fsdp_cpp.integrations.trainer import Trainer
"""
