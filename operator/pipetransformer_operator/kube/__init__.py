"""The cluster: jobs and pods in the API server. Only this room imports a Kubernetes client."""
