import deepspeed
from transformers import AutoModelForCausalLM

# 모델 로드
model = AutoModelForCausalLM.from_pretrained("gpt2")

# DeepSpeed ZeRO-2 설정
ds_config = {
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 2,  # ZeRO Stage 2 활성화
        "offload_optimizer": {"device": "cpu"}  # 옵티마이저를 CPU로 오프로딩 가능
    }
}

# DeepSpeed 초기화
model, optimizer, _, _ = deepspeed.initialize(model=model, config=ds_config)

# 학습 예제
inputs = torch.randint(0, 50257, (1, 128)).cuda()
outputs = model(inputs, labels=inputs)
loss = outputs.loss
model.backward(loss)
model.step()
