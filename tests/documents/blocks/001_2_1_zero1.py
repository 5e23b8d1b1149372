import deepspeed
from transformers import AutoModelForCausalLM

# 모델 로드
model = AutoModelForCausalLM.from_pretrained("gpt2")

# DeepSpeed ZeRO-1 설정
ds_config = {
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 1  # ZeRO Stage 1 활성화
    }
}

# DeepSpeed 초기화
model, optimizer, _, _ = deepspeed.initialize(model=model, config=ds_config)

# 학습 예제
inputs = torch.randint(0, 50257, (1, 128)).cuda()
outputs = model(inputs, labels=inputs)
loss = outputs.loss
model.backward(loss)  # DeepSpeed가 제공하는 backward()
model.step()
