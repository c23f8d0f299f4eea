# syntax=docker/dockerfile:1
# The HTTP service. Collection and models are volumes, so that nothing in the image changes.
#
#   docker build -t hashseek .
#   docker run -p 8000:8000 -v ./collection:/collection hashseek

FROM python:3.12-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
COPY pyproject.toml README.md LICENSE ./
COPY retrieval retrieval
COPY training training
COPY indexing indexing
COPY api api
RUN pip install --no-cache-dir .

FROM python:3.12-slim-bookworm
RUN useradd --system --uid 10001 --create-home hashseek \
    && install -d -o hashseek -g hashseek /collection /models
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH \
    HASHSEEK_COLLECTION=/collection \
    HASHSEEK_HOST=0.0.0.0 \
    HASHSEEK_PORT=8000
USER 10001
VOLUME ["/collection", "/models"]
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz/ready', timeout=4)"]
ENTRYPOINT ["hashseek"]
CMD ["serve"]
