"""The cluster: jobs and pods as the API server keeps them. Nothing else imports a Kubernetes client; all writes go
through `kube.api`."""
