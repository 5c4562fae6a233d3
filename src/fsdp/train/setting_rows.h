// The rows of the table of settings.
#pragma once

#include <vector>

#include "fsdp/train/settings.h"

namespace fsdp::train {

std::vector<Setting> make_setting_rows();

}  // namespace fsdp::train
