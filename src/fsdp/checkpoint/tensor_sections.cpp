#include "fsdp/checkpoint/tensor_sections.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// What a section and a box of its model tensor share; nullopt when that has no elements.
std::optional<SectionBox> shared_part(const TensorSection& section, size_t index, const Box& box) {
  SectionBox part{.section = index, .stored = {}, .model = {}};
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    const int64_t begin = std::max(box.offsets[d], section.offsets[d]);
    const int64_t end =
        std::min(box.offsets[d] + box.sizes[d], section.offsets[d] + section.shape[d]);
    if (begin >= end) return std::nullopt;
    part.model.offsets.push_back(begin);
    part.model.sizes.push_back(end - begin);
    part.stored.offsets.push_back(begin - section.offsets[d]);
    part.stored.sizes.push_back(end - begin);
  }
  return part;
}

}  // namespace

std::vector<SectionBox> cut_at_sections(std::span<const TensorSection> sections,
                                        const Box& model_box) {
  FSDP_ASSERT(model_box.offsets.size() == model_box.sizes.size());
  std::vector<SectionBox> parts;
  int64_t numel = 0;
  for (size_t s = 0; s < sections.size(); ++s) {
    const TensorSection& section = sections[s];
    FSDP_CHECK(section.shape.size() == model_box.sizes.size(), "a box of ", model_box.sizes.size(),
               " dims cannot be cut at section '", section.name, "' of shape ",
               list_text(section.shape), "; give a box of the tensor the section belongs to");
    FSDP_ASSERT(section.offsets.size() == section.shape.size());
    std::optional<SectionBox> part = shared_part(section, s, model_box);
    if (!part) continue;
    numel += part->model.numel();
    parts.push_back(*std::move(part));
  }
  FSDP_CHECK(numel == model_box.numel(), "the box at ", list_text(model_box.offsets),
             " with sizes ", list_text(model_box.sizes), " shares ", numel,
             " elements with the sections of its tensor instead of ", model_box.numel(),
             "; give a box inside the tensor");
  return parts;
}

}  // namespace fsdp
