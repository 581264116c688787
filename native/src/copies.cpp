// Many copies to a GPU in one call: a layer of missing experts is hundreds of runs, each a call of the driver.
#include "freetoken.h"

int ft_copy_runs(ft_copy_fn copy, const ft_copy *runs, int64_t n, void *stream) {
  for (int64_t i = 0; i < n; ++i) {
    const ft_copy &run = runs[i];
    const int result = copy(run.to, reinterpret_cast<const void *>(uintptr_t(run.from)), size_t(run.n_bytes), stream);
    if (result != 0) return result;
  }
  return 0;
}
