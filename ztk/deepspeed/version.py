"""The version of DeepSpeed whose interface ztk provides. Scripts and Hugging Face compare it with their requirements."""

__version__ = version = "0.19.8+ztk"
__version_major__, __version_minor__, __version_patch__ = map(int, version.partition("+")[0].split("."))
__git_hash__ = __git_branch__ = git_hash = git_branch = "ztk"
