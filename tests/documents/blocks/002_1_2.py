import deepspeed

# Existing PyTorch code
model = MyModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

# Switching to DeepSpeed (minimal changes)
model_engine, optimizer, _, _ = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=model.parameters(),
    config="ds_config.json"
)
