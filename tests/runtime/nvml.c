/* The functions of NVML that GpuMeter calls, for two GPUs, the second of which is divided. Environment variables say what
   fails, each time that a function is called. */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };

typedef struct { const char *uuid, *name; unsigned index, busy, memory_busy, milliwatts, celsius; int is_part; } Gpu;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned long long total, free, used; } Memory;

static const Gpu GPUS[] = {
    {"GPU-aaaa", "NVIDIA H200", 0, 10, 20, 300500, 41, 0},
    {"GPU-bbbb", "NVIDIA L4", 1, 90, 55, 71250, 63, 0},
    {"MIG-cccc", "NVIDIA L4 MIG 1g.6gb", 3, 0, 0, 0, 63, 1},
};

static int lost(void) { return getenv("NVML_LOST") != NULL; }

const char *nvmlErrorString(int error) { return "an error of the test"; }

int nvmlInitWithFlags(unsigned flags) { return getenv("NVML_NO_DRIVER") ? DRIVER_NOT_LOADED : OK; }

int nvmlShutdown(void) { return OK; }

int nvmlDeviceGetHandleByUUID(const char *uuid, const Gpu **gpu)
{
    if (getenv("NVML_NO_DEVICE")) return NOT_FOUND;
    for (size_t i = 0; i < sizeof GPUS / sizeof *GPUS; i++)
        if (!strcmp(GPUS[i].uuid, uuid)) { *gpu = &GPUS[i]; return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(const Gpu *gpu, unsigned *index) { *index = gpu->index; return lost() ? GPU_IS_LOST : OK; }

int nvmlDeviceGetName(const Gpu *gpu, char *name, unsigned length)
{
    if (strlen(gpu->name) >= length) return INVALID_ARGUMENT;
    strcpy(name, gpu->name);
    return lost() ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetUtilizationRates(const Gpu *gpu, Rates *rates)
{
    if (gpu->is_part) return NOT_SUPPORTED;
    *rates = (Rates){gpu->busy, gpu->memory_busy};
    return lost() ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetMemoryInfo(const Gpu *gpu, Memory *memory)
{
    *memory = (Memory){24000000000ull, 17000000000ull, 7000000000ull};
    return lost() ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetPowerUsage(const Gpu *gpu, unsigned *milliwatts)
{
    if (gpu->is_part || getenv("NVML_NO_POWER")) return NOT_SUPPORTED;
    *milliwatts = gpu->milliwatts;
    return lost() ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetTemperature(const Gpu *gpu, int sensor, unsigned *celsius)
{
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = gpu->celsius;
    return lost() ? GPU_IS_LOST : OK;
}
