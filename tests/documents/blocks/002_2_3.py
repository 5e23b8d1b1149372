import deepspeed
from transformers import AutoModelForCausalLM

# Model creation method matters for ZeRO-3
with deepspeed.zero.Init(config_dict_or_path="ds_config.json"):
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
# Parameters are partitioned from the start, preventing memory peaks
