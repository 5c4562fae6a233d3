// `fsdp patch`: shows patches of weights, verifies them, and applies them to exported weights.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/checkpoint/patches/applied_patches.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "fsdp/cli/command.h"

namespace fsdp::cli {

namespace {

struct PatchArguments {
  std::vector<std::string> paths;
  bool tensors = false;
};

// Each is a patch, or a directory of patches.
std::vector<std::string> patches_at(const std::vector<std::string>& paths, const char* command) {
  if (paths.empty())
    throw UsageError(
        concat("PATCH is missing; e.g. fsdp patch ", command, " patches/", patch_name(100, 102)));
  std::vector<std::string> patches;
  for (const std::string& path : paths) {
    FSDP_CHECK(path_exists(path), path, " is not there; give patches or a directory of them");
    const bool is_patch = path_exists(concat(path, "/", kPatchRecordName));
    const std::vector<std::string> found = is_patch ? std::vector{path} : patches_in(path);
    FSDP_CHECK(!found.empty(), path,
               ": neither is a patch nor holds one; give a directory such as ",
               patch_name(100, 102), ", or one that has them");
    patches.insert(patches.end(), found.begin(), found.end());
  }
  return patches;
}

std::string share_text(int64_t part, int64_t whole) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f %%",
                whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
  return text;
}

int64_t numel_of_change(const PatchChange& change) {
  return static_cast<int64_t>(change.values.size()) / element_bytes(change.tensor.dtype);
}

// --- show ----------------------------------------------------------------------------------------

void show_patch(const std::string& path, bool with_tensors) {
  const PatchRecord record = read_patch_record(path);
  int64_t numel = 0;
  int64_t dense_bytes = 0;
  for (const StoredTensor& tensor : record.tensors) {
    numel += numel_of(tensor);
    dense_bytes += bytes_of(tensor);
  }
  int64_t bytes = 0;
  for (const StoredFile& file : record.files) bytes += file.bytes;
  std::map<std::string, int64_t> changed;
  int64_t num_changed = 0;
  for_each_change(path, record, [&](const PatchChange& change) {
    changed[change.tensor.name] += numel_of_change(change);
    num_changed += numel_of_change(change);
  });
  std::cout << path << ": " << patch_text(record) << ", names " << record.names << "\n  "
            << counted_text(num_changed, "element") << " of " << grouped_text(numel) << " ("
            << share_text(num_changed, numel) << ") in "
            << counted_text(static_cast<int64_t>(changed.size()), "tensor") << ", "
            << bytes_text(bytes) << " in "
            << counted_text(static_cast<int64_t>(record.files.size()), "file")
            << "; all weights are " << bytes_text(dense_bytes) << "\n";
  if (!with_tensors) return;
  for (const StoredTensor& tensor : record.tensors)
    if (const auto it = changed.find(tensor.name); it != changed.end())
      std::cout << "  " << tensor.name << " " << name_of(tensor.dtype) << " "
                << list_text(tensor.shape) << ": " << grouped_text(it->second) << " ("
                << share_text(it->second, numel_of(tensor)) << ")\n";
}

void run_patch_show(const PatchArguments& given) {
  for (const std::string& path : patches_at(given.paths, "show")) show_patch(path, given.tensors);
}

// --- verify --------------------------------------------------------------------------------------

struct PatchFinding {
  std::optional<PatchRecord> record;
  std::string fault;
};

// Reads every byte of a patch that `before` leads to. Returns its elements.
int64_t verified_elements(const std::string& path, const PatchRecord& record,
                          const std::optional<AppliedPatch>& before) {
  if (before) check_follows(before, record, path);
  verify_patch_files(path, record);
  int64_t num_changed = 0;
  for_each_change(path, record,
                  [&](const PatchChange& change) { num_changed += numel_of_change(change); });
  return num_changed;
}

void run_patch_verify(const PatchArguments& given) {
  const std::vector<std::string> paths = patches_at(given.paths, "verify");
  std::vector<PatchFinding> findings(paths.size());
  const PatchRecord* newest = nullptr;  // a run that went back replaced some of the stream before
  for (size_t i = 0; i < paths.size(); ++i) try {
      const PatchRecord& record = findings[i].record.emplace(read_patch_record(paths[i]));
      if (newest == nullptr || record.begun > newest->begun) newest = &record;
    } catch (const Error& error) {
      findings[i].fault = error.what();
    }
  std::optional<AppliedPatch> before;
  int64_t num_faults = 0;
  for (size_t i = 0; i < paths.size(); ++i) {
    auto& [record, fault] = findings[i];
    if (record) try {
        // A full patch may lie beside the one that leads to the same step.
        const bool is_next =
            record->base == newest->base && !(before && before->step == record->to);
        const std::optional<AppliedPatch> follows = is_next ? before : std::nullopt;
        if (is_next) before = {record->base, record->to};
        const int64_t num_changed = verified_elements(paths[i], *record, follows);
        std::cout << paths[i] << ": " << patch_text(*record) << ", "
                  << counted_text(num_changed, "element") << ", as written\n";
      } catch (const Error& error) {
        fault = error.what();
      }
    if (fault.empty()) continue;
    if (paths.size() == 1) throw Error(fault);
    std::cout << "WRONG " << fault << "\n";
    ++num_faults;
  }
  FSDP_CHECK(num_faults == 0, num_faults, " of ", paths.size(),
             " patches are damaged or follow none; the lines that begin with WRONG say why");
}

// --- apply ---------------------------------------------------------------------------------------

void print_applied(const std::string& patch, const AppliedChanges& changes) {
  std::cout << "applied " << patch << ": " << counted_text(changes.num_elements, "element")
            << " in " << counted_text(changes.num_tensors, "tensor") << "\n";
}

void run_patch_apply(const PatchArguments& given) {
  if (given.paths.size() < 2)
    throw UsageError(
        "TARGET and PATCH are needed; e.g. fsdp patch apply exported patches/, with weights that "
        "fsdp convert --to hf has written");
  const std::string& target = given.paths.front();
  FSDP_CHECK(is_directory(target), target,
             " is no directory; give the one that has the weights as safetensors files");
  for (size_t i = 1; i < given.paths.size(); ++i) {
    const std::string& path = given.paths[i];
    patches_at({path}, "apply");  // something is there
    if (path_exists(concat(path, "/", kPatchRecordName)))
      print_applied(path, apply_patch(path, target));
    else
      apply_new_patches(path, target, print_applied);
  }
  std::cout << target << " has the weights of step " << read_applied(target)->step << "\n";
}

constexpr const char* kPatchFooter =
    "A PATCH is a directory that fsdp train --patches or a PatchStream has written, or a directory "
    "of such.\n"
    "Examples:\n"
    "  fsdp patch show patches                        what each has\n"
    "  fsdp patch verify patches                      every byte, and that one follows the other\n"
    "  fsdp patch apply exported patches              all that are new to the weights in exported\n"
    "docs/weights-out.md tells more.";

struct PatchCommand {
  const char* name;
  const char* text;
  const char* what;  // its arguments
  void (*run)(const PatchArguments& given);
};

constexpr PatchCommand kPatchCommands[] = {
    {"show", "Show what patches change", "Patches, or directories of them", run_patch_show},
    {"verify", "Read every byte of patches, and check that they follow each other",
     "Patches, or directories of them", run_patch_verify},
    {"apply", "Change weights in safetensors files in place",
     "First TARGET, the directory of the weights; then patches, or directories of them",
     run_patch_apply}};

}  // namespace

Command add_patch(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("patch", "Show, verify and apply patches of weights");
  app->footer(kPatchFooter);
  app->require_subcommand(0, 1);  // its absence is handled below
  const auto given = std::make_shared<PatchArguments>();
  std::vector<std::pair<const CLI::App*, void (*)(const PatchArguments&)>> commands;
  for (const PatchCommand& command : kPatchCommands) {
    CLI::App* each = app->add_subcommand(command.name, command.text);
    each->footer(kPatchFooter);
    each->allow_extras();
    each->add_option("PATCH", given->paths, command.what)->type_name("");
    if (std::string(command.name) == "show")
      each->add_flag("--tensors", given->tensors, "List the changed tensors, too");
    commands.emplace_back(each, command.run);
  }
  return {app, [=] {
            for (const auto& [each, run] : commands)
              if (each->parsed()) return run(*given);
            throw UsageError(
                "no subcommand was given; use fsdp patch show, fsdp patch verify or fsdp patch "
                "apply");
          }};
}

}  // namespace fsdp::cli
