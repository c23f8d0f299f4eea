"""Collections in a Milvus server, `milvus://host:19530/name`. pymilvus is loaded when one is opened."""
