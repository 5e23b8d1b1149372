# Also activate at PyTorch level
from deepspeed.runtime.activation_checkpointing import checkpointing

class TransformerLayer(nn.Module):
    def forward(self, x):
        return checkpointing.checkpoint(self._forward, x)

    def _forward(self, x):
        # Actual computation
        return self.attention(self.norm1(x)) + x
