"""Collections in a Milvus server, `milvus://host:19530/name`. Only `connection` loads pymilvus, when it connects."""
