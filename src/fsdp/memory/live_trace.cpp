#include "fsdp/memory/live_trace.h"

#include <algorithm>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"

namespace fsdp {

std::vector<int64_t> live_bytes(const LiveTrace& trace) {
  // Differences first, one running sum after: linear in the number of intervals.
  std::vector<int64_t> change(static_cast<size_t>(trace.num_times) + 1, 0);
  for (const LiveInterval& interval : trace.intervals) {
    int64_t& begins = change[static_cast<size_t>(interval.first)];
    begins = checked_add(begins, interval.bytes);
    change[static_cast<size_t>(interval.last) + 1] -= interval.bytes;
  }
  int64_t live = 0;
  for (int64_t& value : change) {
    live = checked_add(live, value);
    value = live;
  }
  change.pop_back();
  return change;
}

int64_t lower_bound_bytes(const LiveTrace& trace) {
  const std::vector<int64_t> live = live_bytes(trace);
  return live.empty() ? 0 : *std::max_element(live.begin(), live.end());
}

int32_t most_live_units(const LiveTrace& trace, const BucketTable& table, BucketRole role) {
  // As if each stay of a unit were one bucket of one byte: the intervals of a group are one stay.
  LiveTrace stays;
  stays.num_times = trace.num_times;
  for (const LiveInterval& interval : trace.intervals) {
    if (table.bucket(interval.bucket).role != role) continue;
    if (!stays.intervals.empty() && interval.group >= 0 &&
        stays.intervals.back().group == interval.group)
      continue;
    stays.intervals.push_back(interval);
    stays.intervals.back().bytes = 1;
  }
  return static_cast<int32_t>(lower_bound_bytes(stays));
}

void check_trace(const LiveTrace& trace, const BucketTable& table) {
  std::vector<int32_t> live_until(static_cast<size_t>(table.num_buckets()), -1);
  int32_t previous_first = 0;
  for (const LiveInterval& interval : trace.intervals) {
    const Bucket& bucket = table.bucket(interval.bucket);
    const std::string where = table.text(interval.bucket);
    FSDP_CHECK(interval.bytes == bucket.bytes, where, " has ", interval.bytes,
               " bytes in the trace and ", bucket.bytes,
               " in the declaration; record the trace again");
    FSDP_CHECK(
        interval.first >= 0 && interval.first <= interval.last && interval.last < trace.num_times,
        where, " is live from ", interval.first, " to ", interval.last,
        ", which is not within the ", trace.num_times, " times of the trace");
    FSDP_CHECK(!interval.may_begin_later || interval.first < interval.last, where,
               " is live at time ", interval.first, " only, so it cannot begin later");
    FSDP_CHECK(interval.first >= previous_first, where, " begins at ", interval.first,
               " but stands after an interval that begins at ", previous_first,
               "; intervals stand in the order in which they are acquired");
    previous_first = interval.first;
    int32_t& until = live_until[static_cast<size_t>(table.index_of(interval.bucket))];
    FSDP_CHECK(until < interval.first, where, " is acquired at ", interval.first,
               " while it is still live until ", until, "; release it first or join the intervals");
    until = interval.last;
  }
}

}  // namespace fsdp
