#include "fsdp/checkpoint/other_optimizer.h"

#include <ATen/ATen.h>

namespace fsdp {

namespace {

// Calls body(member, elements in the group's buffer, the same in this rank's part) for the members
// of which this rank has something in [flat).
void for_each_held(const ParamGroup& group, FlatRange flat, const auto& body) {
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const FlatRange held = group.held_of(i);
    const int64_t begin = group.layout().tensor_range(i).begin + held.begin;
    const FlatRange common = intersect({begin, begin + held.numel()}, flat);
    if (!common.empty()) body(i, common, FlatRange{common.begin - begin, common.end - begin});
  }
}

}  // namespace

void read_other(const OtherOptimizer& optimizer, const ParamGroup& group, const std::string& tensor,
                FlatRange flat, const at::Tensor& into) {
  into.zero_();
  for_each_held(group, flat, [&](int64_t member, FlatRange common, FlatRange part) {
    const auto it = optimizer.parts.find({group.name_of(member), tensor});
    if (it == optimizer.parts.end()) return;
    into.narrow(0, common.begin - flat.begin, common.numel())
        .copy_(it->second.narrow(0, part.begin, part.numel()));
  });
}

void set_other(OtherOptimizer& optimizer, const ParamGroup& group, const std::string& tensor,
               FlatRange flat, const at::Tensor& values) {
  for_each_held(group, flat, [&](int64_t member, FlatRange common, FlatRange part) {
    at::Tensor& own = optimizer.parts[{group.name_of(member), tensor}];
    if (!own.defined()) own = at::zeros({group.held_of(member).numel()}, at::kFloat);
    own.narrow(0, part.begin, part.numel())
        .copy_(values.narrow(0, common.begin - flat.begin, common.numel()));
  });
}

}  // namespace fsdp
