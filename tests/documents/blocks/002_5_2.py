# Save checkpoint
def save_checkpoint(model_engine, save_dir, tag=None):
    # Save in DeepSpeed format (includes distributed state)
    model_engine.save_checkpoint(save_dir, tag=tag)

# Example: save every 1000 steps
if model_engine.global_steps % 1000 == 0:
    save_checkpoint(model_engine, "./checkpoints", tag=f"step_{model_engine.global_steps}")

# Load checkpoint
_, client_sd = model_engine.load_checkpoint("./checkpoints", tag="step_1000")

# Extract weights in standard PyTorch format under ZeRO-3
if args.zero_stage == 3:
    state_dict = model_engine._zero3_consolidated_16bit_state_dict()
    if model_engine.local_rank == 0:
        torch.save(state_dict, "model_weights.pt")
