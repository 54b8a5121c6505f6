/* The Python face of the native side. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "mounting.h"
#include "requests.h"
#include "serving.h"

enum { TAKEN_MOST = 64 }; /* at once */

static PyObject *prepare(PyObject *self, PyObject *args)
{
    struct settings settings = {0};
    PyObject *directories;
    unsigned long long wanted;
    unsigned long published;
    int threads, fuse_fd, table_fd;

    if (!PyArg_ParseTuple(args, "O!iKkii", &PyTuple_Type, &directories, &threads, &wanted, &published, &fuse_fd, &table_fd))
        return NULL;
    if (threads < 1 || threads > MAX_THREADS || PyTuple_GET_SIZE(directories) > MAX_DIRECTORIES) {
        PyErr_SetString(PyExc_ValueError, "too many threads or directories");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(directories); i++) {
        settings.directories[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(directories, i));
        if (PyErr_Occurred())
            return NULL;
    }
    settings.directory_count = (int)PyTuple_GET_SIZE(directories);
    settings.thread_count = threads;
    settings.wanted_flags = wanted;
    settings.published_most = published;
    if (!serving_prepare(&settings, fuse_fd, table_fd))
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *mounted(PyObject *self, PyObject *unused)
{
    return PyBool_FromLong(mounting_is_done());
}

static PyObject *agrees(PyObject *self, PyObject *unused)
{
    return PyBool_FromLong(serving_agrees());
}

static PyObject *connection(PyObject *self, PyObject *unused)
{
    return Py_BuildValue("(ii)", serving_fuse_fd(), serving_table_fd());
}

static PyObject *flags(PyObject *self, PyObject *unused)
{
    return Py_BuildValue("(KK)", (unsigned long long)serving_offered(), (unsigned long long)serving_agreed());
}

static PyObject *probe(PyObject *self, PyObject *fd)
{
    int number = (int)PyLong_AsLong(fd);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(serving_probe(number));
}

static PyObject *set_passthrough(PyObject *self, PyObject *enabled)
{
    serving_set_passthrough(PyObject_IsTrue(enabled) == 1);
    Py_RETURN_NONE;
}

static PyObject *publish(PyObject *self, PyObject *args)
{
    unsigned long long inode, size_bytes;
    Py_buffer object_id, blob;
    unsigned short directory, dataset;
    bool done = false;

    if (!PyArg_ParseTuple(args, "Ky*HHKy*", &inode, &object_id, &directory, &dataset, &size_bytes, &blob))
        return NULL;
    if (object_id.len == OBJECT_ID_BYTES) {
        struct table *table = serving_lock();
        struct slot *slot = table ? table_slot(table, inode) : NULL;
        if (slot) {
            done = table_describe(table, slot, blob.buf, (size_t)blob.len) &&
                   table_publish(table, slot, object_id.buf, directory, dataset, size_bytes);
            table_forget_unused(table, slot);
        }
        serving_unlock();
    }
    PyBuffer_Release(&object_id);
    PyBuffer_Release(&blob);
    return PyBool_FromLong(done);
}

static PyObject *withdraw_slot(struct table *table, struct slot *slot)
{
    uint32_t uses = 0;
    if (slot) {
        table_withdraw(table, slot);
        uses = table_uses(table, slot);
        table_forget_unused(table, slot);
    }
    serving_unlock();
    return PyLong_FromUnsignedLong(uses);
}

static PyObject *withdraw(PyObject *self, PyObject *inode)
{
    unsigned long long number = PyLong_AsUnsignedLongLong(inode);
    if (PyErr_Occurred())
        return NULL;
    struct table *table = serving_lock();
    return withdraw_slot(table, table ? table_find(table, number) : NULL);
}

static const uint8_t *object_id_of(PyObject *bytes)
{
    if (!PyBytes_Check(bytes) || PyBytes_GET_SIZE(bytes) != OBJECT_ID_BYTES) {
        PyErr_SetString(PyExc_ValueError, "not an object id");
        return NULL;
    }
    return (const uint8_t *)PyBytes_AS_STRING(bytes);
}

static PyObject *withdraw_object(PyObject *self, PyObject *bytes)
{
    const uint8_t *object_id = object_id_of(bytes);
    if (!object_id)
        return NULL;
    struct table *table = serving_lock();
    return withdraw_slot(table, table ? table_find_object(table, object_id) : NULL);
}

static PyObject *uses(PyObject *self, PyObject *bytes)
{
    const uint8_t *object_id = object_id_of(bytes);
    if (!object_id)
        return NULL;
    struct table *table = serving_lock();
    struct slot *slot = table ? table_find_object(table, object_id) : NULL;
    uint32_t count = slot ? table_uses(table, slot) : 0;
    serving_unlock();
    return PyLong_FromUnsignedLong(count);
}

static PyObject *hand_over(PyObject *self, PyObject *args)
{
    unsigned long long inode;
    Py_buffer blob;
    bool is_native = false;

    if (!PyArg_ParseTuple(args, "Ky*", &inode, &blob))
        return NULL;
    struct table *table = serving_lock();
    struct slot *slot = mounting_is_done() && table ? table_slot(table, inode) : NULL;
    if (slot) {
        table_describe(table, slot, blob.buf, (size_t)blob.len);
        is_native = slot->is_published || table_mode(table, slot) == MODE_PASSTHROUGH;
        if (is_native)
            slot->opening++; /* until the reply */
    }
    serving_unlock();
    PyBuffer_Release(&blob);
    return PyBool_FromLong(is_native);
}

static PyObject *opens_fd(PyObject *self, PyObject *unused)
{
    return PyLong_FromLong(serving_queue_fd(OPENS));
}

static PyObject *reads_fd(PyObject *self, PyObject *unused)
{
    return PyLong_FromLong(serving_queue_fd(READS));
}

static size_t at_most(PyObject *limit)
{
    long most = PyLong_AsLong(limit);
    return most < 0 ? 0 : most < TAKEN_MOST ? (size_t)most : TAKEN_MOST;
}

static PyObject *take_opens(PyObject *self, PyObject *limit)
{
    struct open_request taken[TAKEN_MOST];
    size_t most = at_most(limit);

    if (PyErr_Occurred())
        return NULL;
    size_t count = serving_take_opens(taken, most);
    PyObject *found = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; found && i < count; i++) {
        PyObject *item = Py_BuildValue("(KKI)", (unsigned long long)taken[i].unique, (unsigned long long)taken[i].inode, taken[i].flags);
        if (item)
            PyList_SET_ITEM(found, (Py_ssize_t)i, item);
        else
            Py_CLEAR(found);
    }
    return found;
}

static PyObject *take_reads(PyObject *self, PyObject *limit)
{
    struct read_request taken[TAKEN_MOST];
    size_t most = at_most(limit);

    if (PyErr_Occurred())
        return NULL;
    size_t count = serving_take_reads(taken, most);
    PyObject *found = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; found && i < count; i++) {
        PyObject *item = Py_BuildValue("(KKKI)", (unsigned long long)taken[i].unique, (unsigned long long)taken[i].inode,
                                       (unsigned long long)taken[i].offset, taken[i].size);
        if (item)
            PyList_SET_ITEM(found, (Py_ssize_t)i, item);
        else
            Py_CLEAR(found);
    }
    return found;
}

static PyObject *answer_open(PyObject *self, PyObject *args)
{
    unsigned long long unique, fh;
    int error;

    if (!PyArg_ParseTuple(args, "KiK", &unique, &error, &fh))
        return NULL;
    serving_answer_open(unique, error, fh);
    Py_RETURN_NONE;
}

static PyObject *answer_read(PyObject *self, PyObject *args)
{
    unsigned long long unique;
    Py_buffer bytes;
    int error;

    if (!PyArg_ParseTuple(args, "Kiy*", &unique, &error, &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    serving_answer(unique, error, bytes.buf, (size_t)bytes.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&bytes);
    Py_RETURN_NONE;
}

static PyObject *answer_read_from(PyObject *self, PyObject *args)
{
    unsigned long long unique, inode, offset;
    unsigned int size;
    int fd;

    if (!PyArg_ParseTuple(args, "KKiKI", &unique, &inode, &fd, &offset, &size))
        return NULL;
    struct read_request request = {unique, inode, offset, size};
    serving_answer_read_from(&request, fd);
    Py_RETURN_NONE;
}

static PyObject *forget_name(PyObject *self, PyObject *args)
{
    unsigned long long parent;
    Py_buffer name;

    if (!PyArg_ParseTuple(args, "Ky*", &parent, &name))
        return NULL;
    serving_forget_name(parent, name.buf, (size_t)name.len);
    PyBuffer_Release(&name);
    Py_RETURN_NONE;
}

static PyObject *harvest(PyObject *self, PyObject *limit)
{
    long most = PyLong_AsLong(limit);
    PyObject *found = PyList_New(0);

    if (!found || (most == -1 && PyErr_Occurred()))
        return NULL;
    while (most-- > 0) {
        struct table *table = serving_lock();
        struct slot *slot = table ? table_harvest(table) : NULL;
        if (!slot) {
            serving_unlock();
            break;
        }
        struct slot copy = *slot;
        slot->opened_count = 0;
        slot->read_bytes = 0;
        table_forget_unused(table, slot);
        serving_unlock();
        PyObject *item = Py_BuildValue("(Ky#HIKKI)", (unsigned long long)copy.inode, copy.object_id, (Py_ssize_t)OBJECT_ID_BYTES,
                                       copy.dataset, copy.opened_count, (unsigned long long)copy.read_bytes,
                                       (unsigned long long)copy.size_bytes, copy.opened_seconds);
        if (!item || PyList_Append(found, item) != 0) {
            Py_XDECREF(item);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(item);
    }
    return found;
}

static PyObject *opened(PyObject *self, PyObject *unused)
{
    PyObject *found = PyList_New(0);
    int collects = PyGC_Disable(); /* a finalizer that gave up the GIL under the lock would be a deadlock */
    struct table *table = serving_lock();
    bool failed = !found;

    for (size_t i = 0; !failed && table && i < table->buckets; i++)
        for (struct slot *slot = table->by_inode[i]; slot && !failed; slot = slot->next_of_inode) {
            struct opens opens = table_opens(table, slot);
            if (slot->record == NO_RECORD)
                continue;
            PyObject *item = Py_BuildValue("(KHHHy#)", (unsigned long long)slot->inode, opens.passthrough, opens.native, opens.daemon,
                                           slot->blob ? (char *)slot->blob : "", (Py_ssize_t)slot->blob_bytes);
            failed = !item || PyList_Append(found, item) != 0;
            Py_XDECREF(item);
        }
    serving_unlock();
    if (collects)
        PyGC_Enable();
    if (failed)
        Py_CLEAR(found);
    return found;
}

static PyObject *counts(PyObject *self, PyObject *unused)
{
    size_t published = 0, backing = 0, passthrough = 0, native = 0, daemon = 0;
    struct table *table = serving_lock();

    if (table) {
        published = table->published_count;
        for (uint32_t i = 0; i < table->memory->records_used; i++) {
            const struct record *record = &table->memory->records[i];
            uint64_t packed = record->opens;
            struct opens opens;
            if (record->inode == 0)
                continue;
            memcpy(&opens, &packed, sizeof opens);
            passthrough += opens.passthrough;
            native += opens.native;
            daemon += opens.daemon;
            backing += record->backing_id > 0;
        }
    }
    serving_unlock();
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "published", (Py_ssize_t)published, "backing",
                         (Py_ssize_t)backing, "passthrough", (Py_ssize_t)passthrough, "native", (Py_ssize_t)native, "python",
                         (Py_ssize_t)daemon, "opens", (unsigned long long)counters.opens, "releases",
                         (unsigned long long)counters.releases, "reads", (unsigned long long)counters.reads, "read_bytes",
                         (unsigned long long)counters.read_bytes, "forwarded", (unsigned long long)counters.forwarded, "interrupted",
                         (unsigned long long)counters.interrupted, "passthrough_failures",
                         (unsigned long long)counters.passthrough_failures);
}

static PyObject *stop(PyObject *self, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS
    serving_stop();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *close_connection(PyObject *self, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS
    serving_close();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, "Before the mount. See _kernel.pyi for all of these."},
    {"mounted", mounted, METH_NOARGS, NULL},
    {"agrees", agrees, METH_NOARGS, NULL},
    {"connection", connection, METH_NOARGS, NULL},
    {"flags", flags, METH_NOARGS, NULL},
    {"probe", probe, METH_O, NULL},
    {"set_passthrough", set_passthrough, METH_O, NULL},
    {"publish", publish, METH_VARARGS, NULL},
    {"withdraw", withdraw, METH_O, NULL},
    {"withdraw_object", withdraw_object, METH_O, NULL},
    {"uses", uses, METH_O, NULL},
    {"hand_over", hand_over, METH_VARARGS, NULL},
    {"opens_fd", opens_fd, METH_NOARGS, NULL},
    {"take_opens", take_opens, METH_O, NULL},
    {"answer_open", answer_open, METH_VARARGS, NULL},
    {"reads_fd", reads_fd, METH_NOARGS, NULL},
    {"take_reads", take_reads, METH_O, NULL},
    {"answer_read", answer_read, METH_VARARGS, NULL},
    {"answer_read_from", answer_read_from, METH_VARARGS, NULL},
    {"forget_name", forget_name, METH_VARARGS, NULL},
    {"harvest", harvest, METH_O, NULL},
    {"opened", opened, METH_NOARGS, NULL},
    {"counts", counts, METH_NOARGS, NULL},
    {"stop", stop, METH_NOARGS, NULL},
    {"close", close_connection, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void)
{
    PyObject *created = PyModule_Create(&module);

    if (created) {
        PyModule_AddObject(created, "PASSTHROUGH", PyLong_FromUnsignedLongLong(INIT_PASSTHROUGH));
        PyModule_AddObject(created, "HAS_RESEND", PyLong_FromUnsignedLongLong(INIT_HAS_RESEND));
        PyModule_AddObject(created, "NATIVE_HANDLE", PyLong_FromUnsignedLongLong(NATIVE_HANDLE));
        PyModule_AddIntConstant(created, "MAX_THREADS", MAX_THREADS);
    }
    return created;
}
