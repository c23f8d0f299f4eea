"""What requests contain and what is answered: parameters, schemas, errors."""
