import torch
import deepspeed
from torch.utils.data import DataLoader

def main():
    # Initialize distributed environment
    deepspeed.init_distributed()

    # Create model
    model = GPT2LMHeadModel.from_pretrained("gpt2")

    # Initialize DeepSpeed engine
    model_engine, optimizer, train_loader, lr_scheduler = deepspeed.initialize(
        model=model,
        training_data=train_dataset,
        config="ds_config.json"
    )

    # Training loop
    for epoch in range(num_epochs):
        for batch in train_loader:
            input_ids = batch["input_ids"].to(model_engine.device)
            labels = batch["labels"].to(model_engine.device)

            # Forward pass
            outputs = model_engine(input_ids=input_ids, labels=labels)
            loss = outputs.loss

            # Backward pass (DeepSpeed handles scaling/accumulation)
            model_engine.backward(loss)

            # Parameter update (includes gradient clipping)
            model_engine.step()

            print(f"Step: {model_engine.global_steps}, Loss: {loss.item():.4f}")
