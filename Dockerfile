# The HTTP service. The collection and the keys are in the volume /data, so that nothing in the image changes.
#
#   docker build -t hashseek .                             # for CPUs; VARIANT=gpu for NVIDIA GPUs
#   docker run --rm -v data:/data -v ~/Pictures:/pictures:ro hashseek index add /data/collection /pictures
#   docker run --rm -v data:/data hashseek keys create me --role admin --keys /data/keys.toml
#   docker run -p 8000:8000 -v data:/data -v ~/Pictures:/pictures:ro -e HASHSEEK_KEYS=/data/keys.toml hashseek
#
# docs/how-to/operate-the-service.md has more. TORCH_INDEX_URL is the URL of an index with other builds of PyTorch, such as
# those for CPUs: PyTorch's installation page lists them. The default builds contain CUDA, 5 GB that only GPUs need.

FROM python:3.12-slim-bookworm AS build
ARG VARIANT=cpu
ARG TORCH_INDEX_URL=
WORKDIR /src
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
COPY pyproject.toml README.md LICENSE ./
COPY retrieval retrieval
COPY training training
COPY indexing indexing
COPY api api
# hadolint takes the extra for a package whose version is open.
# hadolint ignore=DL3013
RUN if [ "$VARIANT" = cpu ]; then sed -i '/"faiss-gpu/d; s/\("faiss-cpu[^;"]*\);[^"]*/\1/' pyproject.toml; fi \
    && pip install --no-cache-dir ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} '.[milvus,otel]'

FROM python:3.12-slim-bookworm
RUN useradd --uid 10001 --create-home hashseek \
    && install -d -o hashseek -g hashseek /data
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH \
    HASHSEEK_COLLECTION=/data/collection \
    HASHSEEK_HOST=0.0.0.0 \
    HASHSEEK_PORT=8000 \
    XDG_CACHE_HOME=/data/cache
USER 10001
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"HASHSEEK_PORT\"]}/healthz/ready', timeout=4)"]
ENTRYPOINT ["hashseek"]
CMD ["serve"]
