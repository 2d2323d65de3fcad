"""A variational autoencoder, and a generator with its discriminator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VAE(nn.Module):
    """Images -> convolutions -> mean and log-variance -> a draw -> transposed convolutions."""

    def __init__(self, width: int = 16, latent: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 64, 2 * latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 2 * width * 64),
            nn.Unflatten(1, (2 * width, 8, 8)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The image that the draw stands for, and the draw's mean and log-variance."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        draw = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(draw), mean, log_variance

    def loss(self, images: Tensor) -> Tensor:
        """Reconstruction error and distance from the standard normal distribution."""
        image, mean, log_variance = self(images)
        error = F.binary_cross_entropy(image, images)
        distance = (mean**2 + log_variance.exp() - 1 - log_variance).mean() / 2
        return error + 0.1 * distance


class Generator(nn.Module):
    """Noise -> transposed convolutions with BatchNorm -> images of 16 x 16."""

    def __init__(self, latent: int = 16, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise[:, :, None, None])


class Discriminator(nn.Module):
    """Images of 16 x 16 -> convolutions -> a score."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.InstanceNorm2d(2 * width, affine=True),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).squeeze(1)
