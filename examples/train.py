from sklearn.datasets import load_digits
from torch import Generator, nn, tensor
from torch.utils.data import TensorDataset, random_split

from pipetransformer import Freeze, Pipeline, Training, train


def model() -> list[nn.Module]:
    patches = nn.Sequential(nn.Unflatten(1, (16, 4)), nn.Linear(4, 32))
    blocks = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)]
    return [patches, *blocks, nn.Sequential(nn.Flatten(), nn.Linear(16 * 32, 10))]


if __name__ == "__main__":  # not where load_model imports this file for its function
    pixels, digits = load_digits(return_X_y=True)
    samples = TensorDataset(tensor(pixels).float() / 16, tensor(digits))
    data = random_split(samples, [0.8, 0.2], Generator().manual_seed(0))
    training = Training(epochs=4, global_batch_size=100)
    freeze = Freeze(policy="PaperSchedule", alpha=0.5, start_after_epochs=1)  # random layers learn first
    result = train(model=model, data=data, training=training, freeze=freeze, pipeline=Pipeline(stages=2))
    print(f"{result.steps} steps, {result.frozen_layers} layers frozen, accuracy {result.metrics['accuracy']}")
