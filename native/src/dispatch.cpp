// dispatch.cpp - which table of kernels runs here, and what is known of each weight type.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "freetoken.h"
#include "kernels.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace ft {
namespace {

struct Feature {
  const char *name;
  bool present;
};

#if defined(__x86_64__) || defined(__i386__)
// Older compilers' checks do not know the name. Where AVX2 is usable, so is this: it has no registers of its own.
bool has_avxvnni() {
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif

// What the CPU has and the operating system saves (the compiler's check reads XCR0 too).
const std::string &feature_names() {
  static const std::string names = [] {
    std::string s;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    const Feature features[] = {
        {"avx2", bool(__builtin_cpu_supports("avx2"))},
        {"fma", bool(__builtin_cpu_supports("fma"))},
        {"f16c", bool(__builtin_cpu_supports("f16c"))},
        {"avx512f", bool(__builtin_cpu_supports("avx512f"))},
        {"avx512bw", bool(__builtin_cpu_supports("avx512bw"))},
        {"avx512dq", bool(__builtin_cpu_supports("avx512dq"))},
        {"avx512vl", bool(__builtin_cpu_supports("avx512vl"))},
        {"avx512vnni", bool(__builtin_cpu_supports("avx512vnni"))},
        {"avx512vbmi", bool(__builtin_cpu_supports("avx512vbmi"))},
        {"gfni", bool(__builtin_cpu_supports("gfni"))},
        {"bmi2", bool(__builtin_cpu_supports("bmi2"))},
        {"avxvnni", has_avxvnni()},
    };
    for (const Feature &f : features) {
      if (f.present) s += (s.empty() ? "" : " ") + std::string(f.name);
    }
#endif
    return s;
  }();
  return names;
}

bool has(const char *feature) {
  return (" " + feature_names() + " ").find(" " + std::string(feature) + " ") != std::string::npos;
}

bool has_all(std::initializer_list<const char *> features) {
  return std::all_of(features.begin(), features.end(), has);
}

// The tables that this CPU can run, best first. AVX-VNNI comes before AVX-512 without VNNI, since a shorter dot product
// gains more than wider vectors; no processor is known to have these two and not AVX-512 VNNI.
const std::vector<const Kernels *> &usable() {
  static const std::vector<const Kernels *> tables = [] {
    const bool avx2 = has_all({"avx2", "f16c", "fma"});
    const bool avx512 = avx2 && has_all({"avx512f", "avx512bw", "avx512dq", "avx512vl"});
    const bool vnni = avx512 && has("avx512vnni");
    std::vector<const Kernels *> all;
    const bool vbmi = vnni && has_all({"avx512vbmi", "gfni", "bmi2"});
    if (vbmi) all.push_back(kernels_avx512vbmi());
    if (vbmi) all.push_back(kernels_avx512gather());  // by name alone: slow on AMD, not yet measured on Intel
    if (vnni) all.push_back(kernels_avx512vnni());
    if (avx2 && has("avxvnni")) all.push_back(kernels_avxvnni());
    if (avx512) all.push_back(kernels_avx512());
    if (avx2) all.push_back(kernels_avx2());
    all.push_back(kernels_portable());
    all.erase(std::remove(all.begin(), all.end(), nullptr), all.end());  // not compiled
    return all;
  }();
  return tables;
}

const Kernels *best() { return usable().front(); }

const Kernels *named(const char *name) {
  if (!std::strcmp(name, "auto")) return best();
  for (const Kernels *k : usable()) {
    if (!std::strcmp(k->name, name)) return k;
  }
  return nullptr;
}

std::atomic<const Kernels *> chosen{nullptr};
std::atomic<DecodeFn> registered[kMaxTypes];

bool in_range(int type) { return type >= 0 && type < kMaxTypes; }

}  // namespace

const Kernels &kernels() {
  const Kernels *k = chosen.load(std::memory_order_acquire);
  return k ? *k : *best();
}

int type_class(int type) {
  switch (type) {
    case Q4_0: case Q4_1: case Q5_0: case Q5_1: case Q8_0: case IQ4_NL: case MXFP4:
      return 32;
    case Q2_K: case Q3_K: case Q4_K: case Q5_K: case Q6_K: case IQ4_XS:
    case IQ2_XXS: case IQ2_XS: case IQ2_S: case IQ3_XXS: case IQ3_S:
      return 256;
    default:
      return 0;
  }
}

DecodeFn decoder(int type) {
  if (!in_range(type)) return nullptr;
  const DecodeFn own = kernels().decode_row[type];
  return own ? own : registered[type].load(std::memory_order_acquire);
}

bool needs_scratch(int type) { return !in_range(type) || !kernels().matvec[type]; }

void matvec(int type, const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
            const void *const *act, int n, int planes, float *const *out, float *scratch) {
  const Kernels &k = kernels();
  if (k.matvec[type]) {
    k.matvec[type](w, row_bytes, n_cols, row0, row1, act, n, planes, out);
    return;
  }
  const DecodeFn decode = decoder(type);
  for (int64_t r = row0; r < row1; ++r) {
    decode(w + r * row_bytes, scratch, n_cols);
    for (int i = 0; i < n; ++i) out[i][r] = k.dot_f32(scratch, static_cast<const float *>(act[i]), n_cols);
  }
}

}  // namespace ft

extern "C" {

const char *ft_variant(void) { return ft::kernels().name; }

int ft_set_variant(const char *name) {
  const ft::Kernels *k = ft::named(name);
  if (!k) return -1;
  ft::chosen.store(k, std::memory_order_release);
  return 0;
}

const char *ft_cpu_features(void) { return ft::feature_names().c_str(); }

int ft_type_class(int type) { return ft::type_class(type); }

void ft_set_to_float(int type, ft_to_float_fn fn) {
  if (ft::in_range(type)) ft::registered[type].store(fn, std::memory_order_release);
}

int ft_can_decode(int type) { return ft::decoder(type) != nullptr; }

int64_t ft_act_bytes(int cls, int64_t n_cols, int n_tokens) { return n_tokens * ft::act_token_bytes(cls, n_cols); }

}  // extern "C"
