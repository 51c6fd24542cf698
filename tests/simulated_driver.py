"""A ``libcuda.so.1`` that describes GPUs which do not exist, for what asks the NVIDIA driver (``rlhfkit/gpus.py``).

It has the functions of CUDA's driver API that are asked, with their documented types; ``SIMULATED_GPUS`` of them exist.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char bytes[16]; } CUuuid;
static int shown[64], count;

static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

int cuDriverGetVersion(int *version) { *version = number("SIMULATED_CUDA", 13000); return 0; }

int cuInit(unsigned flags) {
    int there = number("SIMULATED_GPUS", 0);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    count = 0;
    if (!visible) {
        for (; count < there; count++) shown[count] = count;
    } else {
        char text[1024];
        snprintf(text, sizeof text, "%s", visible);
        for (char *entry = strtok(text, ","); entry; entry = strtok(NULL, ",")) {
            int gpu = strncmp(entry, "GPU-", 4) ? atoi(entry) : (int)strtol(strrchr(entry, '-') + 1, NULL, 16) - 1;
            if (gpu < 0 || gpu >= there) break;
            shown[count++] = gpu;
        }
    }
    return number("SIMULATED_ERROR", 0);
}

int cuDeviceGetCount(int *number) { *number = count; return 0; }
int cuDeviceGet(int *device, int index) { *device = shown[index]; return 0; }
int cuDeviceGetUuid(CUuuid *uuid, int device) { memset(uuid, 0xff, 16); return 0; }
int cuDeviceGetUuid_v2(CUuuid *uuid, int device) { memset(uuid, 0, 16); uuid->bytes[15] = device + 1; return 0; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Simulated %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
    return 0;
}
"""


def simulated_uuid(gpu: int) -> str:
    """The UUID of the GPU with this number on the machine."""
    return f"00000000-0000-0000-0000-{gpu + 1:012x}"


def simulated_driver(folder: Path, gpus: int) -> dict[str, str]:
    """Build the library; returns the environment variables with which a process finds it, and ``gpus`` GPUs."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the library that stands for NVIDIA's driver is built with a C compiler")
    source = folder / "driver.c"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "SIMULATED_GPUS": str(gpus)}
