"""The version of DeepSpeed whose interface ztk provides. Scripts and Hugging Face compare it with their requirements."""

__version__ = version = "0.19.8+ztk"
__version_major__, __version_minor__, __version_patch__ = map(int, version.partition("+")[0].split("."))
__git_hash__ = __git_branch__ = git_hash = git_branch = "ztk"
# Nothing is compiled in advance, and 0.0 makes readers query torch itself.
installed_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info = dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0")
