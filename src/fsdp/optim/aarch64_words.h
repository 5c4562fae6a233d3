// Instructions of aarch64 as machine words. Registers are numbers: D of the result, A and B of
// operands; words without them have zeros in their place.
#pragma once

#include <cstdint>

namespace fsdp::aarch64 {

using Word = uint32_t;

// Bits from which on D, A and B lie in a word.
inline constexpr int kRegisterBits[] = {0, 5, 16};

constexpr Word with_registers(Word word, int d, int a = 0, int b = 0) {
  return word | static_cast<Word>(d) | static_cast<Word>(a) << 5 | static_cast<Word>(b) << 16;
}

// --- vectors -------------------------------------------------------------------------------------

inline constexpr Word kMultiply = 0x6E20DC00;      // fmul    D.4s, A.4s, B.4s
inline constexpr Word kAddProduct = 0x4E20CC00;    // fmla    D.4s, A.4s, B.4s
inline constexpr Word kTakeProduct = 0x4EA0CC00;   // fmls    D.4s, A.4s, B.4s
inline constexpr Word kEstimate = 0x4EA1D800;      // frecpe  D.4s, A.4s
inline constexpr Word kEstimateStep = 0x4E20FC00;  // frecps  D.4s, A.4s, B.4s
inline constexpr Word kRoot = 0x6EA1F800;          // fsqrt   D.4s, A.4s
inline constexpr Word kDivide = 0x6E20FC00;        // fdiv    D.4s, A.4s, B.4s
inline constexpr Word kWidenLow = 0x2E613800;      // shll    D.4s, A.4h, #16
inline constexpr Word kWidenHigh = 0x6E613800;     // shll2   D.4s, A.8h, #16
inline constexpr Word kAddWideLow = 0x0E601000;    // saddw   D.4s, A.4s, B.4h
inline constexpr Word kAddWideHigh = 0x4E601000;   // saddw2  D.4s, A.4s, B.8h
inline constexpr Word kRoundLow = 0x2E604000;      // raddhn  D.4h, A.4s, B.4s
inline constexpr Word kRoundHigh = 0x6E604000;     // raddhn2 D.8h, A.4s, B.4s
inline constexpr Word kEvenHalves = 0x4E401800;    // uzp1    D.8h, A.8h, B.8h
inline constexpr Word kZero = 0x6F00E400;          // movi    D.2d, #0

constexpr Word load_vector(int base, int64_t bytes) {  // ldr qD, [base, #bytes]
  return 0x3DC00000 | static_cast<Word>(bytes / 16) << 10 | static_cast<Word>(base) << 5;
}
constexpr Word store_vector(int base, int64_t bytes) {  // str qD, [base, #bytes]
  return 0x3D800000 | static_cast<Word>(bytes / 16) << 10 | static_cast<Word>(base) << 5;
}

// --- general registers ---------------------------------------------------------------------------

inline constexpr Word kAnd = 0x8A000000;         // and  xD, xA, xB
inline constexpr Word kAndDoubled = 0x8A000400;  // and  xD, xA, xB, lsl #1
inline constexpr Word kAndNot = 0x8A200000;      // bic  xD, xA, xB
inline constexpr Word kAndLarge = 0x92020000;    // and  xD, xA, #0x4000000040000000
inline constexpr Word kOr = 0xAA000000;          // orr  xD, xA, xB
inline constexpr Word kAdd = 0x8B000000;         // add  xD, xA, xB
inline constexpr Word kNothing = 0xD503201F;     // nop
inline constexpr Word kLandingPad = 0xD503245F;  // bti  c: what a call through a pointer may need
inline constexpr Word kReturn = 0xD65F03C0;      // ret

constexpr Word add_constant(int to, int constant) {  // add x, x, #constant, or sub
  const Word word = constant < 0 ? 0xD1000000 | static_cast<Word>(-constant) << 10
                                 : 0x91000000 | static_cast<Word>(constant) << 10;
  return with_registers(word, to, to);
}
inline constexpr int kStack = 31;  // where a register's number stands for an address
constexpr Word load_general(int to, int base, int64_t bytes) {  // ldr x, [base, #bytes]
  return with_registers(0xF9400000 | static_cast<Word>(bytes / 8) << 10, to, base);
}
constexpr Word count_down(int of) {  // subs x, x, #1
  return with_registers(0xF1000400, of, of);
}

// Pairs: of general registers, or of the lower halves of vector ones.
constexpr Word of_pair(Word word, int one, int other, int base, int64_t bytes) {
  return word | static_cast<Word>(one) | static_cast<Word>(base) << 5 |
         static_cast<Word>(other) << 10 | (static_cast<Word>(bytes / 8) & 0x7F) << 15;
}
constexpr Word load_pair(int one, int other, int base, int64_t bytes) {
  return of_pair(0xA9400000, one, other, base, bytes);  // ldp xD, xE, [base, #bytes]
}
constexpr Word load_half_vectors(int one, int other, int base, int64_t bytes) {
  return of_pair(0x6D400000, one, other, base, bytes);  // ldp dD, dE, [base, #bytes]
}
constexpr Word store_half_vectors(int one, int other, int base, int64_t bytes) {
  return of_pair(0x6D000000, one, other, base, bytes);  // stp dD, dE, [base, #bytes]
}

// --- memory ahead, and branches ------------------------------------------------------------------

constexpr Word ask_to_read(int base, int64_t bytes) {  // prfm pldl1keep, [base, #bytes]
  return 0xF9800000 | static_cast<Word>(bytes / 8) << 10 | static_cast<Word>(base) << 5;
}
constexpr Word ask_to_write(int base, int64_t bytes) {  // prfm pstl1keep, [base, #bytes]
  return ask_to_read(base, bytes) | 16;
}

// By so many words, forward or back.
constexpr Word branch(int words) {  // b
  return 0x14000000 | (static_cast<Word>(words) & 0x3FFFFFF);
}
constexpr Word branch_if_zero(int words) {  // b.eq
  return 0x54000000 | (static_cast<Word>(words) & 0x7FFFF) << 5;
}
constexpr Word branch_if_not_zero(int words) {  // b.ne
  return branch_if_zero(words) | 1;
}
constexpr Word branch_if_any_bit(int general, int words) {  // cbnz xD
  return 0xB5000000 | (static_cast<Word>(words) & 0x7FFFF) << 5 | static_cast<Word>(general);
}

}  // namespace fsdp::aarch64
