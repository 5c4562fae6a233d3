// Marks functions that run on hosts and on devices: the same source, the same bits.
#pragma once

#if defined(__CUDACC__)
#define FSDP_HOST_DEVICE __host__ __device__
#else
#define FSDP_HOST_DEVICE
#endif
