// Event files for TensorBoard, written without TensorBoard, in the wire format of protocol buffers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "fsdp/train/log/append_file.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// Writes a file of its own into a directory that others may share. For one thread at a time.
class TensorboardEvents {
 public:
  // Begins a file. TensorBoard then shows only steps up to `resumed_step` from the files before,
  // because this run does the later ones again.
  TensorboardEvents(const std::string& directory, int64_t resumed_step, double time);

  // loss/train, loss_terms/NAME, learning_rate, ...; docs/watching.md lists the tags.
  void step(const StepRecord& record, double time);
  // loss/validation
  void validation(const ValidationRecord& record, double time);
  // All settings as a table, under "settings" of TensorBoard's texts.
  void settings(std::span<const SettingRow> rows, int64_t step, double time);
  // Under "sample" of the texts.
  void sample(const TextSample& sample, double time);

  const std::string& path() const { return file_.path(); }

 private:
  // An encoded event.
  void write(const std::string& event);
  void write_text(std::string_view tag, std::string_view markdown, int64_t step, double time);

  AppendFile file_;
};

}  // namespace fsdp::train
