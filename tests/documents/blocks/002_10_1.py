import deepspeed
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-2-7b-hf")

# Convert to DeepSpeed inference engine
ds_engine = deepspeed.init_inference(
    model=model,
    mp_size=1,                          # Tensor parallel size
    dtype=torch.float16,                # Inference dtype
    checkpoint=None,
    replace_with_kernel_inject=True,    # Inject optimized kernels
    max_tokens=2048,
    replace_method="auto"
)

model = ds_engine.module

# Run inference
inputs = tokenizer("DeepSpeed is ", return_tensors="pt").to("cuda")
with torch.no_grad():
    outputs = model.generate(
        **inputs,
        max_new_tokens=200,
        do_sample=True,
        temperature=0.7
    )
print(tokenizer.decode(outputs[0]))
