"""Reinforcement learning from human feedback with the interface of DeepSpeed-Chat, under the name `deepspeed_chat`."""

from ztk.deepspeed.chat.ppo_trainer import DeepSpeedPPOTrainer
from ztk.deepspeed.chat.reward_model import RewardModel, compute_reward_loss

__all__ = ["DeepSpeedPPOTrainer", "RewardModel", "compute_reward_loss"]
