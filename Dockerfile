# Images of the operator and of the trainer. The trainer's layers are ordered from the least to the most frequently changed.
# A change of our code rebuilds only the last layer, and torch, which takes gigabytes, is not copied again.
# /opt/venv/sbom.cdx.json lists the contents of an image (CycloneDX).
#
# BASE_IMAGE is any Debian with Python 3.11 and its venv module. RUNTIME_IMAGE needs only the same Python at the same path.
# `python -m tools.devcluster images` makes both from Debian packages under the names below, without an outside registry.
ARG BASE_IMAGE=localhost/pipetransformer/python:3.11
ARG RUNTIME_IMAGE=localhost/pipetransformer/python-runtime:3.11
ARG VERSION=0.1.0
# Dependencies of our packages, with extras, read from their pyproject.toml files.
ARG PRINT_DEPENDENCIES="import pathlib, tomllib; \
[print(need) for file in pathlib.Path('/opt/src').glob('*/pyproject.toml') \
for project in [tomllib.loads(file.read_text())['project']] \
for needs in [project['dependencies'], *project.get('optional-dependencies', {}).values()] \
for need in needs if not need.startswith('pipetransformer')]"

FROM ${BASE_IMAGE} AS base
# Settings of pip that the build machine may need. They do not become part of the image's environment.
ARG PIP_CERT
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp nonroot && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
# Build tools of our packages, which are built without pip's build isolation.
RUN pip install --no-cache-dir --disable-pip-version-check setuptools==80.9.0 wheel==0.45.1

FROM ${RUNTIME_IMAGE} AS runtime

FROM base AS operator-build
ARG PIP_CERT
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PRINT_DEPENDENCIES
COPY constraints.txt /opt/
COPY contract/pyproject.toml /opt/src/contract/
COPY operator/pyproject.toml /opt/src/operator/
RUN python -c "${PRINT_DEPENDENCIES}" > /opt/requirements.txt && \
    pip install --no-cache-dir --no-compile --disable-pip-version-check -c /opt/constraints.txt -r /opt/requirements.txt
COPY contract /opt/src/contract
COPY operator /opt/src/operator
# The import compiles what the operator uses. The generated clients of kubernetes have thousands of modules that it does not.
RUN pip install --no-cache-dir --no-compile --disable-pip-version-check --no-deps --no-build-isolation \
    /opt/src/contract /opt/src/operator && rm -r /opt/src && pip check && pip uninstall --yes setuptools wheel pip && \
    python -c "import pipetransformer_operator.__main__"
COPY tools/sbom.py /opt/
COPY --from=runtime /usr/share/doc /opt/runtime-doc
RUN python /opt/sbom.py pipetransformer-operator /opt/runtime-doc > /opt/venv/sbom.cdx.json

# Only what RUNTIME_IMAGE holds, our packages and their dependencies. The RUNTIME_IMAGE of tools.devcluster has no shell and
# no package manager.
FROM runtime AS operator
COPY --from=operator-build /etc/passwd /etc/group /etc/
COPY --from=operator-build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/bin \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
ARG VERSION
ARG REVISION=""
LABEL org.opencontainers.image.title="PipeTransformer operator" \
      org.opencontainers.image.description="Kubernetes operator for elastic pipeline training" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
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
COPY tools/sbom.py /opt/
RUN python /opt/sbom.py pipetransformer > /opt/venv/sbom.cdx.json
ARG VERSION
ARG REVISION=""
LABEL org.opencontainers.image.title="PipeTransformer trainer" \
      org.opencontainers.image.description="Elastic pipeline training that shrinks as layers freeze" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "pipetransformer"]
