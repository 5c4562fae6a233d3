#include "fsdp/train/log/logged_run.h"

#include <algorithm>
#include <span>
#include <variant>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/train/log/json_log.h"
#include "fsdp/train/settings/settings.h"

namespace fsdp::train {

namespace {

// The log has settings by name alone; their table has groups and an order. Settings of another
// version come last.
void put_in_order(std::vector<SettingRow>& rows) {
  const std::span<const Setting> known = settings();
  const auto find = [&](const std::string& name) {
    return std::find_if(known.begin(), known.end(),
                        [&](const Setting& setting) { return name == setting.name; });
  };
  for (SettingRow& row : rows) {
    const auto setting = find(row.name);
    row.group = setting == known.end() ? "others" : setting->group;
    row.help = setting == known.end() ? "" : setting->help;
  }
  std::stable_sort(rows.begin(), rows.end(), [&](const SettingRow& a, const SettingRow& b) {
    return find(a.name) < find(b.name);
  });
}

}  // namespace

LoggedRun read_logged_run(const std::string& path) {
  std::string name = path;
  while (name.size() > 1 && name.ends_with('/')) name.pop_back();
  const std::string log = is_directory(name) ? name + "/log.jsonl" : name;
  FSDP_CHECK(path_exists(log) && !is_directory(log), log,
             ": there is no log; give the directory of a run (fsdp train --checkpoint-dir) or the "
             "file of its --log");
  LoggedRun run{.name = name};
  read_log(log, [&](const LogRecord& record) {
    run.history.restore(record);
    if (const auto* start = std::get_if<RunStart>(&record)) run.facts = start->facts;
  });
  FSDP_CHECK(run.history.last_step(), log,
             ": has no step of a run; wait for its first one, or give the log of another run");
  put_in_order(run.facts.settings);
  return run;
}

}  // namespace fsdp::train
