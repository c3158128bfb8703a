"""Trains a small Whisper of transformers with its written-out attention on random audio."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(0)
config = WhisperConfig(
    vocab_size=128,
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    num_mel_bins=16,
    max_source_positions=32,
    max_target_positions=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    attn_implementation="eager",
)
model = WhisperForConditionalGeneration(config).train()


def step():
    return model(input_features=torch.randn(2, 16, 64), labels=torch.randint(3, 128, (2, 24))).loss


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
