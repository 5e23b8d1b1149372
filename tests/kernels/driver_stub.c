// A libcuda.so.1 of an H100 that is not there, with the functions that Triton's driver and its launchers call. Nothing runs. It refuses what
// the documentation in cuda.h forbids, and hands every launch to `stub_watch`'s function while the parameters are alive.

#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SHARED_OPTIN 232448
#define REFUSE_UNLESS(condition)                                               \
  if (!(condition))                                                            \
  return CUDA_ERROR_INVALID_VALUE

// Handles of modules and functions. image: the cubin, which Triton keeps alive.
typedef struct {
  const void *image;
  uint64_t dynamic_shared;
} Function;

// sizes: grid, block, cluster, dynamic shared bytes, stream, early start, cooperative, spread clusters, unknown attributes.
typedef void (*Watch)(const uint64_t *sizes, const void *image, void **parameters);
static Watch watch;
static CUcontext current;

void stub_watch(Watch given) { watch = given; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)&current; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "refused by the stub of the driver"; return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED_OPTIN; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  REFUSE_UNLESS(memcmp(image, "\177ELF", 4) == 0);
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Function *made = malloc(sizeof(Function));
  made->image = module;
  made->dynamic_shared = 49152;
  *function = (CUfunction)made;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  REFUSE_UNLESS(attribute <= CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE); // later ones are of later GPUs
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    REFUSE_UNLESS(value <= SHARED_OPTIN);
    ((Function *)function)->dynamic_shared = value;
  }
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  REFUSE_UNLESS(attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
  *(CUdeviceptr *)value = address;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const CUlaunchConfig c = *config;
  uint64_t sizes[15] = {c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ, 1, 1, 1, c.sharedMemBytes, (uint64_t)c.hStream};
  for (unsigned i = 0; i < c.numAttrs; i++) {
    const CUlaunchAttribute *each = c.attrs + i;
    switch (each->id) {
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      sizes[6] = each->value.clusterDim.x;
      sizes[7] = each->value.clusterDim.y;
      sizes[8] = each->value.clusterDim.z;
      break;
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: sizes[11] = each->value.programmaticStreamSerializationAllowed; break;
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: sizes[12] = each->value.cooperative; break;
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: sizes[13] = each->value.clusterSchedulingPolicyPreference; break;
    default: sizes[14]++;
    }
  }
  REFUSE_UNLESS(0 < c.gridDimX && c.gridDimX <= INT32_MAX && 0 < c.gridDimY && c.gridDimY <= 65535 && 0 < c.gridDimZ && c.gridDimZ <= 65535);
  REFUSE_UNLESS(0 < c.blockDimX * c.blockDimY * c.blockDimZ && c.blockDimX * c.blockDimY * c.blockDimZ <= 1024);
  REFUSE_UNLESS(c.sharedMemBytes <= ((Function *)function)->dynamic_shared && c.gridDimX % sizes[6] == 0);
  watch(sizes, ((Function *)function)->image, parameters);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType dtype, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  static const unsigned widest[] = {UINT32_MAX, 32, 64, 128};
  struct { // the map of a GPU has another form
    uint64_t address, sizes[5], strides[4];
    uint32_t box[5];
    uint8_t dtype, rank, swizzle, fill;
  } made = {.address = (uint64_t)address, .dtype = dtype, .rank = rank, .swizzle = swizzle, .fill = fill};
  REFUSE_UNLESS((uintptr_t)map % 64 == 0 && made.address % 16 == 0 && 1 <= rank && rank <= 5);
  REFUSE_UNLESS(dtype <= CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle <= 3);
  REFUSE_UNLESS(box[0] * bytes[dtype] % 16 == 0 && box[0] * bytes[dtype] <= widest[swizzle]);
  for (unsigned i = 0; i < rank; i++) {
    REFUSE_UNLESS(0 < sizes[i] && sizes[i] <= 1ull << 32 && 0 < box[i] && box[i] <= 256 && 0 < steps[i] && steps[i] <= 8);
    made.sizes[i] = sizes[i];
    made.box[i] = box[i];
    if (i + 1 < rank) {
      REFUSE_UNLESS(strides[i] % 16 == 0 && strides[i] < 1ull << 40);
      made.strides[i] = strides[i];
    }
  }
  memset(map, 0, sizeof(*map));
  memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}
