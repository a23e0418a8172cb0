# The `dispatch` command: docker run fabric-dispatch:local gateway --help
FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY dispatch dispatch
COPY lua lua
RUN python -m venv /opt/dispatch \
    && /opt/dispatch/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt .

FROM python:3.13-slim
RUN useradd --system --no-create-home dispatch
COPY --from=build /opt/dispatch /opt/dispatch
ENV PATH=/opt/dispatch/bin:$PATH PYTHONUNBUFFERED=1
USER dispatch
ENTRYPOINT ["dispatch"]
CMD ["--help"]
