// Machine code of the overlapped AdamW: its steps in a given order, with registers for their
// variables. See Note [The order of operations].
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "fsdp/optim/overlapped_operations.h"

namespace fsdp::overlapped {

// A function that updates all groups of a const Frame&, as words.
struct alignas(64) Code {
  std::array<aarch64::Word, 512> words{};
  int count = 0;

  constexpr void add(aarch64::Word word) { words[count++] = word; }
  // The place of a word that is not known yet.
  constexpr int leave_out() { return count++; }
};

// Whether an order has every step once, and none before another that it needs.
constexpr bool is_order(const Operations& operations, std::span<const Step> order) {
  if (static_cast<int>(order.size()) != operations.size()) return false;
  std::array<int, Operations::kCapacity> places{};  // counted from 1
  for (size_t i = 0; i < order.size(); ++i) {
    const int operation = operations.find(order[i]);
    if (operation < 0 || places[operation] != 0) return false;
    places[operation] = static_cast<int>(i) + 1;
  }
  for (int i = 0; i < operations.size(); ++i)
    for (int j = i + 1; j < operations.size(); ++j)
      if (places[i] > places[j] && operations[i].conflicts(operations[j])) return false;
  return true;
}

// Which variable has which vector register, between its first use and its last.
class VectorRegisters {
 public:
  constexpr VectorRegisters(const Operations& operations, std::span<const Step> order) {
    held_.fill(kNone);
    int place = 0;
    for (const Step& step : order) {
      const Operation& operation = operations[operations.find(step)];
      for (int j = 0; j < operation.num_uses; ++j)
        last_use_[index_of(operation.uses[j].variable)] = place;
      ++place;
    }
    for (int i = kFirstFree; i < kZeroRegister; ++i) is_free_[i] = true;
  }

  static constexpr int kNone = -1;

  constexpr int take(const Variable& variable) {
    if (variable.role == kDenominatorOf) return kFirstDenominator + variable.of;
    int& held = held_[index_of(variable)];
    if (held != kNone) return held;
    const auto free = std::find(is_free_.begin(), is_free_.end(), true);
    if (free == is_free_.end()) return kNone;
    *free = false;
    held = static_cast<int>(free - is_free_.begin());
    return held;
  }
  constexpr void give_back_after(int place, const Variable& variable) {
    int& held = held_[index_of(variable)];
    if (last_use_[index_of(variable)] != place || held == kNone) return;
    is_free_[held] = true;
    held = kNone;
  }

 private:
  static constexpr int index_of(const Variable& it) { return it.role * kVectors + it.of; }

  std::array<int, (kTests + 1) * kVectors> last_use_{};
  std::array<int, (kTests + 1) * kVectors> held_{};
  std::array<bool, 32> is_free_{};
};

// False if registers do not suffice.
constexpr bool add_steps(Code& code, const Operations& operations, std::span<const Step> order) {
  VectorRegisters registers(operations, order);
  for (int i = 0; i < static_cast<int>(order.size()); ++i) {
    Operation operation = operations[operations.find(order[i])];
    // Operands first: those that are used for the last time leave their registers to the result.
    for (const bool are_results : {false, true}) {
      for (int j = 0; j < operation.num_uses; ++j) {
        const Use& use = operation.uses[j];
        if (use.place == Use::kNoPlace || (use.place == 0) != are_results) continue;
        const int taken = registers.take(use.variable);
        if (taken == VectorRegisters::kNone) return false;
        operation.words[0] |= static_cast<aarch64::Word>(taken)
                              << aarch64::kRegisterBits[use.place];
      }
      for (int j = 0; j < operation.num_uses; ++j)
        if ((operation.uses[j].place == 0) == are_results)
          registers.give_back_after(i, operation.uses[j].variable);
    }
    for (int j = 0; j < operation.num_words; ++j) code.add(operation.words[j]);
  }
  return true;
}

// Some steps of an update, in the order that explains them.
struct Explained {
  std::array<Step, Operations::kCapacity> steps{};
  size_t count = 0;

  template <typename IsWanted>
  constexpr Explained(const Operations& operations, IsWanted is_wanted) {
    for (int i = 0; i < operations.size(); ++i)
      if (is_wanted(operations[i].step.what)) steps[count++] = operations[i].step;
  }
  constexpr operator std::span<const Step>() const { return std::span(steps).first(count); }
};

// To the next group, or to the one before.
constexpr void add_move(Code& code, Kind kind, int groups) {
  const int elements = kGroup * groups;
  code.add(aarch64::add_constant(kGradientAt, elements * gradient_bytes(kind)));
  code.add(aarch64::add_constant(kFirstAt, elements * 4));
  code.add(aarch64::add_constant(kSecondAt, elements * 4));
  code.add(aarch64::add_constant(kWeightAt, elements * weight_bytes(kind)));
  code.add(aarch64::add_constant(kLowerAt, elements * 2));
}

// Goes on to the next group, finds out whether its moments pass ExactQuotientTest, and counts.
constexpr void add_end_of_group(Code& code, Kind kind) {
  namespace a = aarch64;
  add_move(code, kind, 1);
  code.add(a::with_registers(a::kAndNot, kFailed, kAllCarried, kCarriedBits));
  code.add(a::with_registers(a::kAndLarge, kLargeBits, kLargeBits));
  code.add(a::with_registers(a::kOr, kFailed, kFailed, kLargeBits));
  code.add(a::count_down(kGroupsLeft));
}

// Puts everything where it is used. The steps for moments are those of the group after the one
// where all pointers point, so these begin a group before the first.
constexpr void add_entry(Code& code, Kind kind) {
  namespace a = aarch64;
  code.add(a::kLandingPad);
  code.add(a::add_constant(a::kStack, -8 * kNumKept));
  for (int i = 0; i < kNumKept; i += 2)
    code.add(a::store_half_vectors(kFirstKept + i, kFirstKept + i + 1, a::kStack, 8 * i));
  for (int i = 0; i < kFirstDenominator; ++i)
    code.add(a::with_registers(a::load_vector(kFrame, 16 * i), i));
  for (int i = 0; i < kFailed - kGradientAt; ++i)
    code.add(a::load_general(kGradientAt + i, kFrame, offsetof(Frame, gradient) + 8 * i));
  code.add(a::with_registers(a::kZero, kZeroRegister));
  add_move(code, kind, -1);
}
static_assert(offsetof(Frame, decay) == 16 * kDecayFactor);
static_assert(offsetof(Frame, carried) ==
              offsetof(Frame, gradient) + 8 * (kAllCarried - kGradientAt));

constexpr void add_exit(Code& code) {
  namespace a = aarch64;
  for (int i = 0; i < kNumKept; i += 2)
    code.add(a::load_half_vectors(kFirstKept + i, kFirstKept + i + 1, a::kStack, 8 * i));
  code.add(a::add_constant(a::kStack, 8 * kNumKept));
  code.add(a::kReturn);
}

// Note [Two loops]
// The first loop does the steps in the given order, with quotients from multiplications. Where the
// moments of the next group do not pass, it leaves for the second one, which divides everything by
// the unit, and comes back as soon as they do. Before the loops there are the moments of the first
// group, after them the weights of the last one.
//
//     moments --+--> multiplied weights, next moments --+--> divided weights
//               +--> divided weights, next moments -----+
//
// Empty where registers do not suffice.
constexpr Code assembled(Kind kind, std::span<const Step> order) {
  namespace a = aarch64;
  const Operations multiplied(kind), divided(kind, /*num_multiplied=*/0);
  Code code;
  add_entry(code, kind);
  if (!add_steps(code, divided, Explained(divided, is_of_moments))) return {};
  add_end_of_group(code, kind);
  const int start_to_end = code.leave_out();
  const int start_to_divided = code.leave_out();

  // Instructions are fetched four at a time: an order is fast where it was found, here in a loop
  // that begins with the second of four, and up to 9 % slower elsewhere.
  while (code.count % 4 != 1) code.add(a::kNothing);
  const int multiplied_loop = code.count;
  if (!add_steps(code, multiplied, order)) return {};
  add_end_of_group(code, kind);
  const int multiplied_to_divided = code.leave_out();
  code.add(a::branch_if_not_zero(multiplied_loop - code.count));
  const int multiplied_to_end = code.leave_out();

  const int divided_loop = code.count;
  const int divided_to_end = code.leave_out();  // if that was the last group
  if (!add_steps(code, divided, Explained(divided, [](Do) { return true; }))) return {};
  add_end_of_group(code, kind);
  code.add(a::branch_if_any_bit(kFailed, divided_loop - code.count));
  code.add(a::branch_if_not_zero(multiplied_loop - code.count));

  const int end = code.count;
  if (!add_steps(code, divided, Explained(divided, is_of_weights))) return {};
  add_exit(code);
  code.words[start_to_end] = a::branch_if_zero(end - start_to_end);
  code.words[start_to_divided] = a::branch_if_any_bit(kFailed, divided_loop - start_to_divided);
  code.words[multiplied_to_divided] =
      a::branch_if_any_bit(kFailed, divided_loop - multiplied_to_divided);
  code.words[multiplied_to_end] = a::branch(end - multiplied_to_end);
  code.words[divided_to_end] = a::branch_if_zero(end - divided_to_end);
  return code;
}

}  // namespace fsdp::overlapped
