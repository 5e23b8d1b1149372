"""Reinforcement learning from human feedback as DeepSpeed-Chat's users write it, under the name `deepspeed_chat`."""

from ztk.deepspeed.chat.ppo_trainer import DeepSpeedPPOTrainer
from ztk.deepspeed.chat.reward_model import RewardModel, compute_reward_loss

__all__ = ["DeepSpeedPPOTrainer", "RewardModel", "compute_reward_loss"]
