// The few places where the machine shows: the spin hint and the floating-point mode. No vendor headers.
#ifndef FT_PLATFORM_H
#define FT_PLATFORM_H
#include <cstdint>

namespace ft {

inline void pause_hint() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Round to nearest, subnormals kept, whatever the thread had; the former mode comes back at the end of the scope.
// A caller may run with flush-to-zero (torch.set_flush_denormal), which would change bits.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(read()) { write(kDefault); }
  ~DefaultFloatMode() { write(saved_); }
  DefaultFloatMode(const DefaultFloatMode &) = delete;
  DefaultFloatMode &operator=(const DefaultFloatMode &) = delete;

 private:
#if defined(__SSE__)
  static constexpr uint64_t kDefault = 0x1F80;
  static uint64_t read() { return __builtin_ia32_stmxcsr(); }
  static void write(uint64_t mode) { __builtin_ia32_ldmxcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  static uint64_t read() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif
  uint64_t saved_;
};

}  // namespace ft
#endif
