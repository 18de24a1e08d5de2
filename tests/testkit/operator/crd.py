"""The CRD as the repository has it."""

from tools.devcluster.layout import REPOSITORY

CRD = REPOSITORY / "crds" / "training.pipetransformer.io_pipetrainingjobs.yaml"
