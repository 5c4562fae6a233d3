"""python -m fsdp_cpp.convert: checkpoints of torch and Megatron become ours.

    metadata_pickle   what a .metadata file may hold, and nothing else
    dcp               a directory of torch.distributed.checkpoint: its tensors, and where their bytes are
    keys              the names in it
    split_parameters  parameters that Megatron cuts into parts
    training_state    which of all that are weights, moments and steps
    __main__          the command
"""
