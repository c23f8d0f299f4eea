"""What requests and answers contain: parameters, schemas, errors."""
