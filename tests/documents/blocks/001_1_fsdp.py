import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import auto_wrap

from transformers import AutoModelForCausalLM

# 분산 학습 초기화
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())

# 모델 로드
model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
model = FSDP(model)  # 모델을 Fully Sharded Data Parallel로 감싸기

# 옵티마이저 정의
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

# 더미 입력
inputs = torch.randint(0, 50257, (1, 128)).cuda()

# 학습 루프
for epoch in range(1):
    optimizer.zero_grad()
    outputs = model(inputs, labels=inputs)
    loss = outputs.loss
    loss.backward()
    optimizer.step()
