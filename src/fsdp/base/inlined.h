// For functions of loops that are compiled for several instruction sets, or whose operands must not
// leave their registers.
#pragma once

#define FSDP_INLINED [[gnu::always_inline]] inline
