# Images of the operator and of the trainer. Layers go from what changes least to what changes most: a change of our
# code rebuilds only the last one, so it reaches a running pod in seconds although torch weighs gigabytes.
#
# BASE_IMAGE is any Debian with Python 3.11 and its venv module. `python -m tools.devcluster images` makes it from Debian
# packages under the name below, so no outside container registry is needed.
ARG BASE_IMAGE=localhost/pipetransformer/python:3.11
# What our packages need of others, extras too, from their pyproject.toml, so that it is written once.
ARG PRINT_DEPENDENCIES="import pathlib, tomllib; \
[print(need) for file in pathlib.Path('/opt/src').glob('*/pyproject.toml') \
for project in [tomllib.loads(file.read_text())['project']] \
for needs in [project['dependencies'], *project.get('optional-dependencies', {}).values()] \
for need in needs if not need.startswith('pipetransformer')]"

FROM ${BASE_IMAGE} AS base
# Settings of pip that the build machine may need; build arguments never reach the image's environment.
ARG PIP_CERT
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp nonroot && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
# Kept apart from the constraints: our own packages are built with these, without pip's build isolation.
RUN pip install --no-cache-dir --disable-pip-version-check setuptools==80.9.0 wheel==0.45.1

FROM base AS operator
ARG PIP_CERT
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PRINT_DEPENDENCIES
COPY constraints.txt /opt/
COPY contract/pyproject.toml /opt/src/contract/
COPY operator/pyproject.toml /opt/src/operator/
RUN python -c "${PRINT_DEPENDENCIES}" > /opt/requirements.txt && \
    pip install --no-cache-dir --disable-pip-version-check -c /opt/constraints.txt -r /opt/requirements.txt
COPY contract /opt/src/contract
COPY operator /opt/src/operator
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation \
    /opt/src/contract /opt/src/operator && rm -r /opt/src && pip check
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "pipetransformer_operator"]

FROM base AS trainer
ARG PIP_CERT
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_VERSION=2.13.0
RUN pip install --no-cache-dir --disable-pip-version-check torch==${TORCH_VERSION}
ARG PRINT_DEPENDENCIES
COPY constraints.txt /opt/
COPY contract/pyproject.toml /opt/src/contract/
COPY trainer_image/pyproject.toml /opt/src/trainer_image/
RUN python -c "${PRINT_DEPENDENCIES}" > /opt/requirements.txt && \
    pip install --no-cache-dir --disable-pip-version-check -c /opt/constraints.txt -r /opt/requirements.txt
COPY contract /opt/src/contract
COPY trainer_image /opt/src/trainer_image
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation \
    /opt/src/contract /opt/src/trainer_image && rm -r /opt/src && pip check
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "pipetransformer"]
