// Data: text and token files as batches of tokens, the same for any number of ranks; needs no
// torch.
#pragma once

#include "fsdp/data/batch_loader.h"
#include "fsdp/data/batches.h"
#include "fsdp/data/corpus.h"
#include "fsdp/data/token_windows.h"
#include "fsdp/data/tokenizer.h"
